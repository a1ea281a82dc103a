#!/usr/bin/env python3
"""What it costs to compile each product: processor seconds and object size of one instantiation.

    measure.py --compiler CXX [--nvcc NVCC --architecture 90a] [--include DIR]... [--system DIR:DIR...] [--json FILE] [--bounds] FILE...

A file states its bounds in a comment, `// bound: 10 s, 400 KiB`; with --bounds a cost above them is a failure. Seconds are those of the
compiler's processes (user and system), so that other work on the machine hardly shows. Includes alone are measured beside the whole.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compile_unit(arguments, source, scratch):
    target = os.path.join(scratch, "unit.o")
    if source.endswith(".cu"):
        command = [arguments.nvcc, f"-arch=sm_{arguments.architecture}"]
    else:
        command = [arguments.compiler]
    command += ["-std=c++20", "-O3", "-DNDEBUG", "-c", source, "-o", target]
    for folder in arguments.include:
        command += ["-I", folder]
    for folder in filter(None, arguments.system.split(":")):
        command += ["-isystem", folder]
    before = processor_seconds()
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CCACHE_DISABLE": "1"})
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return processor_seconds() - before, os.path.getsize(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--nvcc")
    parser.add_argument("--architecture", default="90a")
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--system", default="")
    parser.add_argument("--json")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()

    rows, failures = [], []
    print(f"{'instantiation':<16}{'compile':>10}{'includes':>10}{'object':>12}{'bound':>22}")
    with tempfile.TemporaryDirectory() as scratch:
        for path in map(pathlib.Path, sorted(arguments.files)):
            text = path.read_text(encoding="utf-8")
            bound = re.search(r"// bound: (\d+) s, (\d+) KiB", text)
            if bound is None:
                sys.exit(f"{path}: no line '// bound: N s, N KiB'")
            most_seconds, most_kib = int(bound[1]), int(bound[2])
            only_includes = os.path.join(scratch, "includes" + path.suffix)
            with open(only_includes, "w", encoding="utf-8") as file:
                file.write("\n".join(re.findall(r"^#include .*$", text, re.MULTILINE)) + "\n")
            include_seconds, _ = compile_unit(arguments, only_includes, scratch)
            seconds, size = compile_unit(arguments, str(path), scratch)
            print(f"{path.name:<16}{seconds:>8.1f} s{include_seconds:>8.1f} s{size / 1024:>8.0f} KiB"
                  f"{most_seconds:>10} s, {most_kib:>5} KiB", flush=True)
            rows.append({"instantiation": path.name, "seconds": round(seconds, 2), "seconds_of_includes": round(include_seconds, 2),
                         "object_bytes": size})
            if arguments.bounds and (seconds > most_seconds or size > most_kib * 1024):
                failures.append(path.name)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows}, file, indent=2)
            file.write("\n")
    for name in failures:
        print(f"above its bound: {name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
