#!/usr/bin/env bash
# Compares the images of this checkout with those of another one, byte by byte: four images of the embedded model by each of six
# command lines, in flags that every version takes. Prints a line per command; exit status 1 if an image differs or is missing.
# Both checkouts run in this one's environment.
# Usage: bash scripts/compare_images.sh OTHER_CHECKOUT
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
other=$(cd "$1" && pwd) here=$(pwd)
python=${PYTHON:-$here/.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
while read -r flags; do
    for checkout in "$other" "$here"; do
        [ "$checkout" = "$here" ] && name=this || name=other
        # shellcheck disable=SC2086 # flags are words
        (cd "$checkout" && $python main.py generate_images --num_images 4 $flags --prompt "$here/configs/emoji_prompts.txt" \
            --heatmaps 0 --output_dir "$out/$name" > "$out/log" 2>&1 < /dev/null) || { cat "$out/log" >&2; exit 1; }
    done
    images=("$out"/this/img/*)
    if [ ${#images[@]} = 4 ] && diff -rq "$out/other/img" "$out/this/img"; then
        echo "same images: $flags"
    else
        echo "OTHER IMAGES: $flags"
        status=1
    fi
    rm -rf "$out/this" "$out/other"
done << 'FLAGS'
--model_type base
--method eagle-2
--method adt-tree
--method self-draft --total_token 32
--method adt-tree --lantern --lantern_k 100 --lantern_delta 0.5
--method self-draft --total_token 32 --batch_size 4
FLAGS
exit $status
