# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an object store: `bucket://`, in memory, without rename, append or locks; it can be made to fail."""

from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from upath.implementations.memory import MemoryPath
from upath.registry import register_implementation


class Bucket(MemoryFileSystem):
    """Objects by name. `fails(operation, path)` is asked before every access and may raise."""

    protocol = "bucket"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    fails = staticmethod(lambda operation, path: None)

    @classmethod
    def clear(cls):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.fails = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("bucket://").strip("/")

    def _open(self, path, mode="rb", **options):
        assert mode in ("rb", "wb", "xb"), mode
        type(self).fails("read" if mode == "rb" else "write", path)
        return super()._open(path, mode, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        type(self).fails("write", path)
        return super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path, *args, **options):
        type(self).fails("read", path)
        return super().cat_file(path, *args, **options)

    def rm_file(self, path):
        type(self).fails("delete", path)
        super().rm_file(path)
        self.pseudo_dirs[:] = [""]  # a store has no empty folders

    def cp_file(self, path1, path2, **options):
        type(self).fails("write", path2)
        super().cp_file(path1, path2, **options)

    def mv(self, *args, **options):
        raise NotImplementedError("an object store has no rename")

    rename = move = mv

    def names(self, folder=""):
        """Return the names of all objects below a folder."""
        start = f"/{folder}".rstrip("/") + "/"
        return sorted(name.removeprefix(start) for name in self.store if name.startswith(start))


class BucketPath(MemoryPath):
    """Paths of that store."""


register_implementation("bucket", BucketPath)
fsspec.register_implementation("bucket", Bucket, clobber=True)
