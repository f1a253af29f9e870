#!/usr/bin/env bash
# Pre-commit hook: checks that text files end in exactly one newline and that no file outside ckpts/emoji exceeds 500 kB.
# Usage: bash scripts/check_files.sh FILE...
set -euo pipefail
status=0
for file in "$@"; do
    [ -f "$file" ] || continue
    case $file in ckpts/emoji/*) ;; *)
        size=$(wc -c <"$file")
        if [ "$size" -gt 500000 ]; then
            echo "$file: $size bytes, the limit is 500000" >&2
            status=1
        fi
        ;;
    esac
    # grep -I does not match binary files (files with a NUL byte); their end is not checked.
    if [ -s "$file" ] && grep -qI . "$file"; then
        if [ -n "$(tail -c 1 "$file")" ]; then
            echo "$file: no newline at the end" >&2
            status=1
        elif [ -z "$(tail -n 1 "$file")" ]; then
            echo "$file: blank lines at the end" >&2
            status=1
        fi
    fi
done
exit $status
