"""Check and time the calls on the device at hand: `python -m m3_pallas check` and `bench`."""
