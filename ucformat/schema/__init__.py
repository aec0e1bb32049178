"""Documents that cross a boundary, as pydantic models, and their JSON Schemas; and the dtypes that tensors may have.

What is here needs no pydantic: whoever only looks for a document, or reads none, does not import it.
"""

from __future__ import annotations

__all__ = [
    "ATTEMPT",
    "CASTABLE",
    "CATALOG_DOCUMENT",
    "FINGERPRINT",
    "FLOATS",
    "INTEGERS",
    "ITEMSIZE",
    "LINEAGE_KINDS",
    "MANIFEST",
    "NEEDED_BY",
    "NUMBERS",
    "SAFETENSORS_DTYPES",
    "SAFETENSORS_PACKED",
    "SERVED",
    "TENSORSTORE_DTYPES",
    "TOMBSTONE",
    "TORCH_NUMBERS",
    "TORCH_SAVE_DTYPES",
    "ZARR_DTYPES",
    "ZARR_EXTENSIONS",
]

#: The names of documents, in the checkpoint's folder.
MANIFEST = "manifest.json"
#: The first member of the document of a server (`served.py`), by which it is recognised.
SERVED = "ucformat_served"
TOMBSTONE = "tombstone.json"
CATALOG_DOCUMENT = "ucformat-catalog.json"

#: The folder of the documents of those who need a checkpoint's files. Each is named after the id of
#: the checkpoint that needs them.
NEEDED_BY = "needed-by"

#: The names of attempts, as a regular expression: no folder that somebody else made is called so by
#: chance.
ATTEMPT = "[0-9a-f]{20}"

#: The dtypes of arrays under names of their own: those of every Zarr v3 reader, and the extensions.
ZARR_DTYPES: dict[str, int] = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

#: Those of them that TensorStore has and no text of Zarr v3 requires: zarr-python 3.1 refuses them
#: until they are registered (`register_zarr_dtypes`).
ZARR_EXTENSIONS = {name: ZARR_DTYPES[name] for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}

#: Bytes of one element, by the name of the dtype: that of Zarr, PyTorch or ml_dtypes. Several
#: values that their owner packs into bytes are one element (docs/spec/format.md, "Dtypes").
ITEMSIZE: dict[str, int] = {
    **ZARR_DTYPES,
    **dict.fromkeys(
        ("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        1,
    ),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("float6_e2m3fn_packed", "float6_e3m2fn_packed"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("complex32", "bcomplex32"), 4),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    "bits16": 2,
}

#: The dtypes that torch.save writes; PyTorch has the integers of fewer than 8 bits, too, but no
#: files of them.
TORCH_SAVE_DTYPES = frozenset(
    [
        *ZARR_DTYPES,
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"),
        *(name for name in ITEMSIZE if name.startswith("bits")),
    ]
)

#: The dtypes of `ml_dtypes` that TensorStore knows, in Zarr v2 and v3
#: under the same name.
TENSORSTORE_DTYPES = (
    "bfloat16", "float8_e3m4", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4",
)  # fmt: skip

#: safetensors' names of data types -> ours.
SAFETENSORS_DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "F6_E2M3": "float6_e2m3fn_packed",
    "F6_E3M2": "float6_e3m2fn_packed",
}

#: Of dtypes with several values in a byte: how many values of the header are how many elements of
#: ours.
SAFETENSORS_PACKED: dict[str, tuple[int, int]] = {
    "float4_e2m1fn_x2": (2, 1),
    "float6_e2m3fn_packed": (4, 3),
    "float6_e3m2fn_packed": (4, 3),
}

FLOATS = frozenset(n for n in ITEMSIZE if n.startswith(("float", "bfloat", "complex", "bcomplex")))

#: The floats, real ones, of which an element is one number.
NUMBERS = frozenset(n for n in FLOATS if "complex" not in n and not n.endswith(("_x2", "_packed")))

#: The integers of whole bytes.
INTEGERS = frozenset(n for n in ZARR_DTYPES if n.startswith(("int", "uint")))

#: The dtypes of which PyTorch casts tensors.
TORCH_NUMBERS = {n for n in TORCH_SAVE_DTYPES if not n.startswith("bits") and not n.endswith("_x2")}

#: The floats that tensors are cast to and averaged in: those that represent zero, signs and
#: overflow.
CASTABLE = NUMBERS & ZARR_DTYPES.keys()

#: The kinds of lineage that this version defines.
LINEAGE_KINDS = (
    *("resume", "finetune", "convert", "reshard", "merge", "average", "quantize", "thin"),
)

#: What a fingerprint begins with where there may be digests, too.
FINGERPRINT = "fingerprint:"
