"""Compares the speed of this checkout with that of another one, on the embedded model.

A process for each checkout generates the same images in turn, so that whatever else slows the machine meets
both; which goes first changes from pair to pair. The processes are started STARTS times, because times also
depend on where a process has its memory. Prints, per case, the median over pairs of the other checkout's time
divided by this one's, with its 95 % interval: above 1, this checkout is faster. Both run in this one's
environment.

Usage: .venv/bin/python scripts/compare_speed.py OTHER_CHECKOUT [PAIRS, by default 30]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
STARTS = 3
CASES = [  # method, temperature, tree (depth, width, drafted nodes; None: the method's own), images in flight
    ("ar", 1, None, 1),
    ("ar", 0, None, 1),
    ("eagle-2", 1, None, 1),
    ("adt-tree", 0, None, 1),
    ("self-draft", 1, (24, 8, 31), 1),
    ("ar", 1, None, 8),
    ("self-draft", 1, (15, 8, 15), 8),
]


def serve():
    """Generates what each line of stdin asks for, and answers with the seconds of decoding."""
    from adt_tree import Pipeline, Sampling, TreeShape

    prompts = (HERE / "configs/emoji_bench.txt").read_text().splitlines()
    pipe = Pipeline.from_pretrained("emoji")
    for line in sys.stdin:
        method, temperature, tree, images, pair = json.loads(line)
        some = [prompts[(pair * images + i) % len(prompts)] for i in range(images)]
        settings = {} if tree is None else {"tree": TreeShape(*tree)}
        sampling = Sampling(temperature, guidance=3)
        out = pipe(some, method, sampling=sampling, seed=pair, batch_size=images, **settings)
        print(out.stats["seconds"], flush=True)


def start(checkout):
    """Starts a process that serves the code of a checkout."""
    command, places = [sys.executable, __file__], {**os.environ, "PYTHONPATH": str(checkout)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=checkout, env=places, text=True, **pipes)


def seconds(process, case, pair):
    """Returns how long a process decodes the images of a pair."""
    print(json.dumps([*case, pair]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        sys.exit("a checkout has failed; its error is above")
    return float(answer)


def compare(other, pairs):
    """Times all cases by both checkouts, and prints the table."""
    import numpy as np

    from eval.columns import interval

    times = {case: [] for case in CASES}  # (other, this) seconds of each pair
    for first in range(0, pairs, -(-pairs // STARTS)):
        processes = start(other), start(HERE)
        for case, pairs_of_case in times.items():
            for process in processes:
                seconds(process, case, 0)  # builds the engine
            for pair in range(first, min(first + -(-pairs // STARTS), pairs)):
                order = processes if pair % 2 else processes[::-1]
                both = {process: seconds(process, case, pair) for process in order}
                pairs_of_case.append([both[process] for process in processes])
        for process in processes:
            process.communicate()
    heading = f"{'':<12}{'T':>3}{'images':>8}{'other, s':>10}{'this, s':>10}{'ratio':>8}"
    print(f"{heading}   95 % interval, {pairs} pairs")
    for (method, temperature, _, images), pairs_of_case in times.items():
        theirs, ours = np.array(pairs_of_case).T
        low, high = interval((theirs / ours,), np.median)
        medians = f"{np.median(theirs):10.3f}{np.median(ours):10.3f}{np.median(theirs / ours):8.3f}"
        print(f"{method:<12}{temperature:3}{images:8}{medians}   {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        sys.path.insert(0, str(HERE))
        compare(Path(sys.argv[1]).resolve(), int((sys.argv[2:] or [30])[0]))
