"""Lets a model of transformers decode by ADT-Tree, given the path or hub id of the checkout that this is in:

    model.generate(**inputs, max_new_tokens=10_000, custom_generate="path or hub id", trust_remote_code=True)

transformers copies this file alone and runs the copy, so the package adt_tree must be installed.
"""

# If an import outside a try block cannot be found, transformers advises to install a package of its name. The
# try block keeps that wrong advice away.
try:
    from adt_tree import generate
except ImportError as error:
    raise ImportError(
        f"custom_generate: ADT-Tree cannot be imported here ({error}): run `pip install -e .` in its checkout"
    ) from error

__all__ = ["generate"]
