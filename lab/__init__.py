"""What is measured beside the methods of adt_tree: rivals, several rows at once, and controls.

Importing it adds its rows to adt_tree.method.METHODS.
"""

from lab.methods import register

register()
