"""Property tests that never depend on how fast or how busy the machine is: no deadline, the same examples each time."""

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
