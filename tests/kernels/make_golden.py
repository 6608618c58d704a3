"""Writes tests/kernels/golden/*.json: what every KV codec stores for awkward inputs. Run it from anywhere.

The codecs are written down here a third time, from their definitions and in plain Python and numpy: the nearest
representable value, of two the one with the even code. Neither torch nor a kernel has a part in it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
WIDTH = 64
LARGEST = {"fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "fp16": 65504.0, "int8": 127 * 65504.0}
FP8 = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}
"""Mantissa bits, exponent bias, code of the largest finite value (OCP FP8, revision 1.0)."""


def fp8_values(mantissa_bits: int, bias: int, last: int) -> np.ndarray:
    """float64 [last + 1], the values of the positive finite codes, ascending."""
    values = []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        whole = 1.0 if exponent else 0.0
        values.append((whole + mantissa / (1 << mantissa_bits)) * 2.0 ** (max(exponent, 1) - bias))
    return np.array(values)


def fp8_codes(name: str, values: np.ndarray) -> bytes:
    table = fp8_values(*FP8[name])
    out = bytearray()
    for value in values.astype(np.float64):
        distance = np.abs(table - abs(value))
        nearest = [int(code) for code in np.flatnonzero(distance == distance.min())]
        code = next((code for code in nearest if code % 2 == 0), nearest[0])
        out.append(code | (0x80 if np.signbit(value) else 0))
    return bytes(out)


def bf16_codes(values: np.ndarray) -> bytes:
    bits = values.view(np.uint32).astype(np.uint64)
    upper, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (upper & 1 == 1))
    return (upper + up).astype("<u2").tobytes()


def int8_codes(values: np.ndarray) -> tuple[bytes, bytes]:
    scale = np.float16(min(np.abs(values).max() / np.float32(127), np.float32(65504)))
    codes = np.zeros(len(values), np.int8)
    if scale > 0:
        codes = np.clip(np.rint(values / np.float32(scale)), -127, 127).astype(np.int8)
    return codes.tobytes(), scale.astype("<f2").tobytes()


def encoded(name: str, row: np.ndarray) -> dict[str, object]:
    """One token and head: its inputs, the bytes that the pool must hold then, and what must be counted."""
    limit = np.float32(FP8_LARGEST[name] if name in FP8 else LARGEST[name])
    finite = np.isfinite(row)
    values = np.where(finite, row, np.float32(0))
    saturated = int((np.abs(values) > limit).sum())
    values = np.clip(values, -limit, limit).astype(np.float32)
    scale = b""
    if name in FP8:
        codes = fp8_codes(name, values)
    elif name == "int8":
        codes, scale = int8_codes(values)
    elif name == "bf16":
        codes = bf16_codes(values)
    else:
        codes = values.astype({"fp32": "<f4", "fp16": "<f2"}[name]).tobytes()
    return {
        "values": row.astype("<f4").tobytes().hex(),
        "codes": codes.hex(),
        "scale": scale.hex(),
        "saturated": saturated,
        "nonfinite": int((~finite).sum()),
    }


FP8_LARGEST = {name: float(fp8_values(*fields)[-1]) for name, fields in FP8.items()}


def inputs() -> np.ndarray:
    """float32 [rows, WIDTH]: ordinary, tiny, huge, halfway between neighbours, at the limits, not finite."""
    random = np.random.default_rng(20)
    normal = random.standard_normal((4, WIDTH))
    spread = random.standard_normal((2, WIDTH)) * np.exp(8 * random.standard_normal((2, WIDTH)))
    small = random.standard_normal((1, WIDTH)) * 2.0**-13
    middles = [(table[1:] + table[:-1]) / 2 for table in (fp8_values(*fields) for fields in FP8.values())]
    halves = (1 + (2 * random.integers(0, 1024, 32) + 1) / 2048) * 2.0 ** random.integers(-14, 15, 32)
    bfloats = (1 + (2 * random.integers(0, 128, 32) + 1) / 256) * 2.0 ** random.integers(-60, 60, 32)
    limits = [2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17, 448, 449, 464, 465, 57344, 61440, 65504, 65519, 65520, 8.4e6, 1e38]
    beside = np.nextafter(np.float32(limits), np.float32(np.inf))
    edges = np.concatenate([limits, beside, [0.0, 1e-45, 3.3895e38, 3.4028234e38]])
    strange = np.ones(WIDTH)
    strange[[3, 17, 40]] = np.nan, np.inf, -np.inf
    parts = [*normal, *spread, *small, *middles, halves, bfloats, edges, strange, np.zeros(1), np.full(WIDTH, 3.0)]
    rows = []
    with np.errstate(over="ignore"):
        for part in parts:
            flat = np.asarray(part, np.float32)
            signed = np.where(random.random(len(flat)) < 0.5, -flat, flat)
            rows.append(np.pad(signed, (0, -len(signed) % WIDTH)).reshape(-1, WIDTH))
    return np.concatenate(rows)


def main() -> None:
    rows = inputs()
    for name in (*LARGEST, *FP8):
        lines = ",\n".join(json.dumps(encoded(name, row)) for row in rows)
        text = f'{{"format": "{name}", "width": {WIDTH}, "rows": [\n{lines}\n]}}\n'
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
