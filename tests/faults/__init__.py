"""The fault bench of checkpoints; `scripts/fault_bench.py` runs it.

case.py                    a case, its verdict, and the checks that all classes share
run_time.py                R: faults in a step, an evaluation or a save; late ranks, bad values, signals
kills.py, killed_runs.py   K: processes of a run are killed during saves, and the run resumes
restarts.py, restarted_rank.py J: processes and hosts are lost, and the others continue without new processes
crash_states.py, power.py  E: every state of the disk after a power failure during a save
corruptions.py             C: files of a checkpoint are changed
storage.py, faulty_runs.py S: the storage fails while a checkpoint is saved or loaded
layouts.py                 T: saved in the background under each layout, loaded under each
hostile.py                 X: checkpoints that were made to do harm
mutants.py                 the same classes on faulty copies of the program: each mutant must be caught
"""

import sys
from pathlib import Path

sys.path += [
    folder
    for name in ("checkpoint", "distributed")
    if (folder := str(Path(__file__).parents[1] / name)) not in sys.path
]
