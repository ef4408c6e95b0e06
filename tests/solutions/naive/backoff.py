"""A learner's backoff.py: the three files of steps 3, 4 and 5."""

import random

with open("/root/qr/schedule.txt", "w") as f:
    for attempt in range(6):
        f.write(f"attempt={attempt} wait={2**attempt}\n")

with open("/root/qr/jitter.txt", "w") as f:
    for _ in range(20):
        f.write(f"{random.uniform(0, 2**3)}\n")

with open("/root/qr/capped.txt", "w") as f:
    for attempt in range(9):
        f.write(f"{min(30, 2**attempt)}\n")
