#!/usr/bin/env python3
"""Holds one wrong use of the library to its sentence.

A test file names the sentence in `// expected-error {{"..."}}`. Compiled as it is, it must be refused and the compiler's message must
hold the sentence. With PENSTOCK_CORRECT defined, which turns the use into its correct twin, it must compile without a warning.

    wrong_use.py --compiler CXX [--nvcc] [--include DIR]... [--system DIR:DIR...] FILE
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile


def expected_in(path):
    with open(path, encoding="utf-8") as file:
        return re.findall(r'//\s*expected-error\s*\{\{"(.*)"\}\}', file.read())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--nvcc", action="store_true")
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--system", default="", help="folders of other headers, separated by :")
    parser.add_argument("file")
    arguments = parser.parse_args()

    expected = expected_in(arguments.file)
    if len(expected) != 1:
        print(f'{arguments.file}: wants exactly one // expected-error {{{{"..."}}}}, has {len(expected)}')
        return 1

    with tempfile.TemporaryDirectory() as scratch:
        if arguments.nvcc:
            command = [arguments.compiler, "-std=c++20", "-arch=sm_90a", "-Werror", "all-warnings", "-ptx", "-o",
                       os.path.join(scratch, "out.ptx")]
        else:
            command = [arguments.compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        for folder in arguments.include:
            command += ["-I", folder]
        for folder in filter(None, arguments.system.split(":")):
            command += ["-isystem", folder]
        wrong = subprocess.run([*command, arguments.file], capture_output=True, text=True)
        right = subprocess.run([*command, "-DPENSTOCK_CORRECT", arguments.file], capture_output=True, text=True)

    failures = []
    if wrong.returncode == 0:
        failures.append("the wrong use compiles")
    # Compilers break no line inside a message, but quote the assertion's own source text too: only their error lines count.
    errors = "\n".join(line for line in (wrong.stderr + wrong.stdout).splitlines() if "error" in line)
    if wrong.returncode != 0 and expected[0] not in errors:
        failures.append(f"the message does not hold the sentence\n  {expected[0]}\nbut says\n{wrong.stderr}{wrong.stdout}")
    if right.returncode != 0:
        failures.append(f"the correct twin does not compile:\n{right.stderr}{right.stdout}")
    for failure in failures:
        print(f"{arguments.file}: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
