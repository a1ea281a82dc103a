#!/usr/bin/env python3
"""Checks that every sentence of a static_assert under include/ is held by a test of a wrong use: held_sentences.py INCLUDE TESTS

A sentence made by PENSTOCK_CHECK_POLICIES stands once in config.hpp and serves many products: each sentence must be held for one
product, and each product by one of them.
"""

import pathlib
import re
import sys

from wrong_use import expected_in

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def statements(text, keyword):
    """The argument text of each call of `keyword`, found by its brackets (strings are skipped)."""
    for match in re.finditer(r"\b" + keyword + r"\s*\(", text):
        depth, position, quoted = 1, match.end(), False
        while depth and position < len(text):
            character = text[position]
            if character == '"' and text[position - 1] != "\\":
                quoted = not quoted
            elif not quoted:
                depth += (character == "(") - (character == ")")
            position += 1
        yield match.start(), text[match.end():position - 1]


def main():
    include, tests = (pathlib.Path(argument) for argument in sys.argv[1:3])
    sentences, templates, products = {}, {}, {}
    for header in sorted([*include.rglob("*.hpp"), *include.rglob("*.cuh")]):
        text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
        for start, body in statements(text, "static_assert"):
            where = f"{header.relative_to(include)}:{text[:start].count(chr(10)) + 1}"
            literals = LITERAL.findall(body)
            if re.search(r'"\s*\bproduct\b\s*"', body):
                before, after = literals[-2:]
                templates[(before, after)] = where
            elif literals:
                whole = re.search(r'((?:"(?:[^"\\]|\\.)*"\s*)+)$', body.replace("\\\n", "\n").strip())
                if not whole:
                    print(f"{where}: cannot read the sentence of this static_assert")
                    return 1
                sentences["".join(LITERAL.findall(whole.group(1)))] = where
        for start, body in statements(text, "PENSTOCK_CHECK_POLICIES"):
            if body.lstrip().startswith('"'):
                products[LITERAL.findall(body)[0]] = f"{header.relative_to(include)}:{text[:start].count(chr(10)) + 1}"

    held = [sentence for path in sorted([*tests.glob("*.cpp"), *tests.glob("*.cu")]) for sentence in expected_in(path)]
    missing = [f'{where}: "{sentence}"' for sentence, where in sentences.items() if sentence not in held]
    for (before, after), where in templates.items():
        if not any(sentence.startswith(before) and sentence.endswith(after) for sentence in held):
            missing.append(f'{where}: "{before}<product>{after}"')
    for product, where in products.items():
        if not any(before + product + after in held for before, after in templates):
            missing.append(f"{where}: no sentence of PENSTOCK_CHECK_POLICIES is held for {product}")
    for line in missing:
        print(f"held by no test: {line}")
    print(f"{len(sentences)} sentences, {len(templates)} shared by {len(products)} products, {len(held)} tests")
    return 1 if missing or not sentences or not templates else 0


if __name__ == "__main__":
    sys.exit(main())
