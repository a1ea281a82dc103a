#!/usr/bin/env python3
"""Draws what benchmark_contention wrote: plot_contention.py RESULTS.json [FIGURE.png]

Three panels: how long an urgent expert waits beside prefetching without end and in the middle of five others (cumulative), what part of the
link each scheduler uses with each chunk, and how long a kernel's misses take beside prefetching, with and without a governor.
Without matplotlib it says so and draws nothing.
"""

import json
import pathlib
import sys


def cumulative(axes, samples, label):
    ordered = sorted(samples)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)


def draw(results, figure, pyplot):
    picture, panels = pyplot.subplots(2, 2, figsize=(14, 10))
    waits, five, link, misses = panels.flat
    for name, samples in results["samples"].items():
        group, what = name.split(": ", 1)
        if group == "saturated" and what.startswith("priority, ") and "adaptive" not in what and "turn" not in what:
            cumulative(waits, samples, what)
        elif group == "five and one" and ("2.0 MiB" in what or what.endswith("whole")):
            cumulative(five, samples, what)
        elif group == "governor":
            cumulative(misses, samples, what)
    waits.set(title="urgent, beside prefetching without end", xlabel="microseconds", ylabel="part of the requests")
    five.set(title="urgent, in the middle of five experts", xlabel="microseconds")
    misses.set(title="a kernel's misses of 42 MiB, beside prefetching", xlabel="microseconds")

    used = [row for row in results["rows"] if row["group"] == "utilisation"]
    lines = {}
    for row in used:
        scheduler, chunk = row["what"].rsplit(", ", 1)
        lines.setdefault(scheduler, []).append((chunk, row["part"]))
    for scheduler, points in lines.items():
        link.plot([chunk for chunk, _ in points], [part for _, part in points], marker="o", label=scheduler)
    link.set(title="part of the link in use", xlabel="chunk", ylabel="of one large copy")
    for axes in panels.flat:
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    facts = results["facts"]
    picture.suptitle(f"{facts['GPU']}, CUDA {facts['CUDA']}, {facts['date']}")
    picture.tight_layout()
    picture.savefig(figure, dpi=120)
    print(figure)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1])
    results = json.loads(source.read_text(encoding="utf-8"))
    try:
        import matplotlib
    except ImportError as reason:
        print(f"plot_contention: no figure, since matplotlib is not there ({reason})")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    draw(results, sys.argv[2] if len(sys.argv) == 3 else str(source.with_suffix(".png")), pyplot)


if __name__ == "__main__":
    main()
