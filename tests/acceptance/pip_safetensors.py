#!/usr/bin/env python3
"""Files of the Python package `safetensors` are read, and files written here are read by the package, tensor by tensor.

    pip_safetensors.py CHECKPOINT_INFO SAFETENSORS_PIPE FIXTURES

Exit 0 when all agree, 1 when not, 77 with a line `SKIPPED: why` where the package is not installed. With numpy the package's own numpy
functions write and read too."""
import ctypes, json, os, random, subprocess, sys, tempfile

try:
    import safetensors
except ImportError as why:
    print(f"SKIPPED: the Python package safetensors is not installed here ({why})")
    sys.exit(77)
try:
    import numpy
    import safetensors.numpy
except ImportError:
    numpy = None

# What the package calls a type when it writes, what stands in the file, and bits of an element. Not every release knows all of them.
TYPES = [
    ("bool", "BOOL", 8), ("uint8", "U8", 8), ("int8", "I8", 8), ("uint16", "U16", 16), ("int16", "I16", 16), ("float16", "F16", 16),
    ("bfloat16", "BF16", 16), ("uint32", "U32", 32), ("int32", "I32", 32), ("float32", "F32", 32), ("uint64", "U64", 64), ("int64", "I64", 64),
    ("float64", "F64", 64), ("complex64", "C64", 64), ("float8_e4m3fn", "F8_E4M3", 8), ("float8_e5m2", "F8_E5M2", 8),
    ("float8_e8m0fnu", "F8_E8M0", 8), ("float8_e4m3fnuz", "F8_E4M3FNUZ", 8), ("float8_e5m2fnuz", "F8_E5M2FNUZ", 8),
]
METADATA = {"format": "pt", "note": "zwölf \"Boxkämpfer\" \\ /\n\t\u0001 \U0001f600", "": "empty key", "empty": ""}
NAMES = ["model.layers.0.weight", "a/b\\c", "zwölf", "\U0001f600", "quote\"", "tab\t", "with space", "nul\0inside", "__metadata", ""]


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return "%016x" % value


def package_writes(tensors, metadata):
    """The bytes of a file of {name: (type as the package says it, shape, data)}."""
    if not hasattr(safetensors, "TensorSpec"):
        return bytes(safetensors.serialize({k: {"dtype": t, "shape": list(s), "data": d} for k, (t, s, d) in tensors.items()}, metadata))
    kept = {k: ctypes.create_string_buffer(d, max(len(d), 1)) for k, (_, _, d) in tensors.items()}
    specs = {
        k: safetensors.TensorSpec(dtype=t, shape=list(s), data_ptr=ctypes.addressof(kept[k]), data_len=len(d))
        for k, (t, s, d) in tensors.items()
    }
    return bytes(safetensors.serialize(specs, metadata))


def package_reads(path):
    """{name: (type as in the file, shape, data)}, and the metadata."""
    blob = open(path, "rb").read()
    tensors = {k: (v["dtype"], list(v["shape"]), bytes(v["data"])) for k, v in safetensors.deserialize(blob)}
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return tensors, header.get("__metadata__", {})


def known_types():
    known = []
    for spoken, written, bits in TYPES:
        try:
            package_writes({"t": (spoken, [1], bytes(bits // 8))}, None)
            known.append((spoken, written, bits))
        except Exception as why:
            print(f"  this release of the package does not write {written}: {str(why)[:80]}")
    return known


def random_tensors(types, seed):
    """{name: (spoken type, written type, shape, data)}: each type with each kind of shape, under names of all kinds."""
    source = random.Random(seed)
    tensors = {}
    for spoken, written, bits in types:
        for shape in ([], [1], [0], [3, 0, 2], [source.randrange(1, 40)], [source.randrange(1, 9), source.randrange(1, 9), 3], [1] * 8):
            count = 1
            for extent in shape:
                count *= extent
            data = source.randbytes(count * bits // 8)
            if written == "BOOL":
                data = bytes(b & 1 for b in data)
            number = len(tensors)
            name = NAMES[number] if number < len(NAMES) else f"tensor {source.randrange(10**9)}.{number}"
            tensors[name] = (spoken, written, shape, data)
    return tensors


def main():
    info, pipe, fixtures = sys.argv[1:4]
    problems = []

    def agree(what, got, wanted):
        if got != wanted:
            different = [k for k in {**got, **wanted} if got.get(k) != wanted.get(k)]
            k = different[0]
            problems.append(f"{what}: {len(different)} differ, {k!r} is {str(got.get(k))[:100]} and not {str(wanted.get(k))[:100]}")
        print(f"{'ok  ' if got == wanted else 'FAIL'} {what} ({len(wanted)})")

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            problems.append(f"{os.path.basename(command[0])}: exit {done.returncode}: {done.stderr[-300:]}")
        return done.stdout if done.returncode == 0 else '{"tensors": []}'

    def both_ways(what, path, wanted, metadata):
        """What lies at `path` is read here as `wanted`; what is written of it here is read by the package as `wanted`."""
        listed = json.loads(run(info, path, "--json", "--digest"))["tensors"]
        agree(f"{what}: read here", {t["name"]: (t["dtype"], t["shape"], t["digest"]) for t in listed},
              {k: (t, s, fnv(d)) for k, (t, s, d) in wanted.items()})
        out = os.path.join(folder, f"{what}.out.safetensors")
        run(pipe, path, out)
        tensors, written = package_reads(out) if os.path.exists(out) else ({}, {})
        agree(f"{what}: written here, read by the package", tensors, wanted)
        agree(f"{what}: its metadata", written, metadata)

    types = known_types()
    print(f"safetensors {getattr(safetensors, '__version__', '?')}, {len(types)} types, {'numpy ' + numpy.__version__ if numpy else 'without numpy'}")
    if len(types) < 12:
        problems.append(f"the package writes {len(types)} types only")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            tensors = random_tensors(types, seed)
            metadata = METADATA if seed != 1 else {}
            path = os.path.join(folder, f"{seed}.safetensors")
            with open(path, "wb") as file:
                file.write(package_writes({k: (spoken, s, d) for k, (spoken, _, s, d) in tensors.items()}, metadata or None))
            both_ways(f"file {seed}", path, {k: (written, s, d) for k, (_, written, s, d) in tensors.items()}, metadata)
        path = os.path.join(folder, "none.safetensors")
        with open(path, "wb") as file:
            file.write(package_writes({}, METADATA))
        try:
            package_reads(path)
            both_ways("no tensors", path, {}, METADATA)
        except safetensors.SafetensorError as why:
            print(f"  this release of the package does not read its own file of metadata alone: {why}")

        # A model in shards: the package reads each, this library all of them by their index.
        wanted = {}
        model = os.path.join(fixtures, "qwen3_moe")
        for shard in sorted(set(json.load(open(os.path.join(model, "model.safetensors.index.json")))["weight_map"].values())):
            wanted.update(package_reads(os.path.join(model, shard))[0])
        both_ways("a model in shards", model, wanted, {})

        if numpy is not None:
            path = os.path.join(folder, "numpy.safetensors")
            arrays = {
                "arange": numpy.arange(60, dtype=numpy.float32).reshape(3, 4, 5),
                "half": numpy.linspace(-2, 2, 9, dtype=numpy.float16),
                "flags": numpy.array([[True, False], [False, True]]),
                "one": numpy.array(7, dtype=numpy.int64),
                "none": numpy.zeros((0, 4), dtype=numpy.uint16),
            }
            safetensors.numpy.save_file(arrays, path, METADATA)
            out = os.path.join(folder, "numpy out.safetensors")
            run(pipe, path, out)
            back = safetensors.numpy.load_file(out) if os.path.exists(out) else {}
            plain = lambda of: {k: (str(a.dtype), a.shape, a.tobytes()) for k, a in of.items()}
            agree("arrays of numpy", plain(back), plain(arrays))
            with safetensors.safe_open(out, framework="np") as opened:
                agree("metadata by safe_open", opened.metadata(), METADATA)
    for problem in problems:
        print(f"FAIL {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
