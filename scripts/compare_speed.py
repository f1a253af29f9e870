"""Compares the speed of this checkout with that of another one, on the embedded model.

A process for each checkout generates the same images in turn, so that whatever else slows the machine meets
both; which goes first changes from pair to pair. The processes are started STARTS times, because times also
depend on where a process has its memory. Prints, per case, the median over pairs of the other checkout's time
divided by this one's, with its 95 % interval: above 1, this checkout is faster. Both run in this one's
environment.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
STARTS, SERVE = 3, "--serve"
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
    """Generates what each line of stdin asks for, and answers with the mean seconds of decoding an image."""
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
    command, places = [sys.executable, __file__, SERVE], {**os.environ, "PYTHONPATH": str(checkout)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=checkout, env=places, text=True, **pipes)


def seconds(process, case, pair):
    """Returns how long a process decodes each image of a pair, in the mean."""
    print(json.dumps([*case, pair]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        sys.exit("a checkout has failed; its error is above")
    return float(answer)


def compare(other, pairs):
    """Times all cases by both checkouts, and prints the table."""
    import numpy as np
    from tqdm import tqdm

    from eval.columns import interval

    progress, turn = tqdm(total=pairs * len(CASES), unit="pair"), -(-pairs // STARTS)
    times = {case: [] for case in CASES}  # (other, this) seconds of each pair
    for first in range(0, pairs, turn):
        processes = start(other), start(HERE)
        for case, pairs_of_case in times.items():
            for process in processes:
                seconds(process, case, 0)  # builds the engine
            for pair in range(first, min(first + turn, pairs)):
                order = processes if pair % 2 else processes[::-1]
                both = {process: seconds(process, case, pair) for process in order}
                pairs_of_case.append([both[process] for process in processes])
                progress.update()
        for process in processes:
            process.communicate()
    progress.close()
    heading = f"{'':<12}{'T':>3}{'images':>8}{'other, s':>10}{'this, s':>10}{'ratio':>8}"
    print(f"{heading}   95 % interval, {pairs} pairs")
    for (method, temperature, _, images), pairs_of_case in times.items():
        theirs, ours = np.array(pairs_of_case).T
        low, high = interval((theirs / ours,), np.median)
        medians = f"{np.median(theirs):10.3f}{np.median(ours):10.3f}{np.median(theirs / ours):8.3f}"
        print(f"{method:<12}{temperature:3}{images:8}{medians}   {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        serve()
        sys.exit()
    sys.path.insert(0, str(HERE))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument(
        "--pairs", type=int, default=30, help="number of pairs of each case, at least 2; default: 30"
    )
    options = parser.parse_args()
    if not (options.other / "main.py").is_file():
        parser.error(f"{options.other}: no checkout, it has no main.py")
    if options.pairs < 2:
        parser.error(f"--pairs {options.pairs}: give 2 or more, an interval needs them")
    compare(options.other.resolve(), options.pairs)
