"""Restarts within the job (--inprocess-restart): supervisors of processes, and generations of ranks that processes join and leave."""
