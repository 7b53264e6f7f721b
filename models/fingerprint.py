"""The hash that two workers compare before KV moves between them: same weights, form, dtype, shape."""

from __future__ import annotations

import mmap

import xxhash

from models.files.read_files import ReadFiles
from shell.progress import track
from tandem.errors import CheckpointError
from tandem.kv_layout import DType

_SLICE_BYTES = 64 << 20


def fingerprint_files(files: ReadFiles, dtype: DType, *computed: str | None) -> str:
    """32 hex digits over name, size and bytes of each file, in the given order, `dtype`, and how it is `computed`.

    Reads the files through the page cache, so it costs one pass over memory after loading.
    Raises CheckpointError naming a file that cannot be read, or is another than the one that was loaded.
    """
    digest = xxhash.xxh3_128(" ".join((dtype.value, *filter(None, computed))).encode())
    for path in track(tuple(files), "hashing weights"):
        try:
            size_bytes = path.stat().st_size
            digest.update(f"\n{path.name} {size_bytes}\n".encode())
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
                memoryview(mapping) as view,
            ):
                for start in range(0, size_bytes, _SLICE_BYTES):
                    with view[start : start + _SLICE_BYTES] as part:
                        digest.update(part)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
    files.check()
    return digest.hexdigest()
