#!/usr/bin/env python3
"""Checks the syntax of many files with one compiler: syntax.py --compiler CXX [--include DIR]... [--system DIR:DIR...] -- FILE..."""

import argparse
import concurrent.futures
import os
import subprocess
import sys


def flags_of(arguments):
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
    for folder in arguments.include:
        flags += ["-I", folder]
    for folder in filter(None, arguments.system.split(":")):
        flags += ["-isystem", folder]
    return flags


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--system", default="", help="folders of other headers, separated by :")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()

    def check(path):
        command = [arguments.compiler, *flags_of(arguments), "-fsyntax-only", path]
        return path, subprocess.run(command, capture_output=True, text=True)

    bad = 0
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for path, result in pool.map(check, arguments.files):
            if result.returncode != 0:
                bad += 1
                print(f"{path}:\n{result.stderr}")
    print(f"{len(arguments.files) - bad} of {len(arguments.files)} files pass")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
