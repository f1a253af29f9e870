"""The folder form of transformers' custom decoding methods, by the path or hub id that this folder is in:

    model.generate(**inputs, max_new_tokens=10_000, custom_generate="path or hub id", trust_remote_code=True)

transformers copies this file alone and runs it, so it needs the installed package.
"""

# transformers looks up every import outside a try block, and advises to install packages of those names.
try:
    from adt_tree import generate
except ImportError as error:
    raise ImportError(
        f"custom_generate: ADT-Tree is not installed here ({error}): run `pip install -e .` in its checkout"
    ) from error

__all__ = ["generate"]
