"""Pipeline parallelism: schedules as data, a simulator that proves them, one executor that runs them."""
