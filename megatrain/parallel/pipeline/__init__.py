"""Pipeline parallelism: schedules as data, a simulator that checks them, one executor that runs them."""
