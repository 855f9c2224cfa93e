"""Pipeline schedules as data: made, completed, checked and simulated without a device."""
