"""The rows of METHODS that are measured beside the library's: rivals, and several rows at once."""

from __future__ import annotations

from dataclasses import replace

from adt_tree.method import METHODS, MethodSpec
from lab.settings import Annealing, Groups, Rows, Runs
from lab.shapes import windowed

SJD = MethodSpec(
    "sjd",
    "speculative Jacobi decoding (2410.01699), exact in distribution but with other images",
    module="lab.rivals.windows",
    tree=windowed(15, 1),  # the sizes of the rivals are the published ones
    chain=True,
    resize=windowed,
    seed_cells=("random", "left", "above"),
    exact=False,
)
RIVALS = (
    SJD,
    replace(
        SJD,
        name="sjd-coupled",
        about="sjd that keeps drafts by maximal coupling (2510.24211)",
        tree=windowed(63, 1),
    ),
    replace(
        SJD,
        name="sjd-gumbel",
        about="a Jacobi window with noise fixed per position (2510.24211): self-draft without a history",
        module="lab.rivals.sjd_gumbel",
        tree=windowed(63, 1),
        verify=("coupled",),
        exact=True,
    ),
    replace(
        SJD,
        name="sjd-pac",
        about="sjd with several candidates for the first two positions (SJD-PAC, 2603.18599)",
        tree=windowed(63, 4),
        chain=False,
    ),
    replace(
        SJD,
        name="gsd",
        about="sjd that counts the probability of a group around a draft (GSD, 2508.07747); relaxed",
        module="lab.rivals.gsd",
        relaxed=Groups(),
    ),
    replace(
        SJD,
        name="sjd-sv",
        about="sjd that judges runs of drafts by one joint ratio (SJD-SV, 2609.13245); relaxed",
        module="lab.rivals.sjd_sv",
        relaxed=Runs(),
    ),
    replace(
        SJD,
        name="cool-sjd",
        about="sjd by the rule of cool-sd, a variant of ours; relaxed",
        relaxed=Annealing(),
    ),
    MethodSpec(
        "cool-sd",
        "eagle-1 that relaxes the first levels of its trees most (Cool-SD, 2601.09212); relaxed",
        module="lab.rivals.cool_sd",
        network=True,
        tree=METHODS["eagle-1"].tree,
        exact=False,
        relaxed=Annealing(),
    ),
    MethodSpec(
        "zipar",
        "ar in several rows at once (ZipAR, 2412.04062), which changes the distribution",
        exact=False,
        relaxed=Rows(newest=True, plain_first=True),
    ),
    replace(
        SJD,
        name="pjd",
        about="sjd in several rows at once (PJD, 2606.05703), which changes the distribution",
        tree=windowed(7, 1),
        seed_cells=("random", "left"),
        relaxed=Rows(newest=True, catches_up=True),
    ),
)


def register() -> None:
    """Adds the rivals to METHODS, and lets ar and self-draft take Rows."""
    METHODS.update({spec.name: spec for spec in RIVALS})
    METHODS.update({name: replace(METHODS[name], relaxed=Rows()) for name in ("ar", "self-draft")})
