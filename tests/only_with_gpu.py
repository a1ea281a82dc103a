#!/usr/bin/env python3
"""Runs a command where there is a GPU, and says why not elsewhere: only_with_gpu.py PROBE COMMAND...

PROBE is a program that exits with 77, which ctest shows as skipped, where no GPU can be used.
"""

import subprocess
import sys

probe = subprocess.run([sys.argv[1]], check=False)
if probe.returncode != 0:
    sys.exit(probe.returncode)
sys.exit(subprocess.run(sys.argv[2:], check=False).returncode)
