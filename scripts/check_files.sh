#!/usr/bin/env bash
# Pre-commit: text ends in exactly one newline; nothing above 500 kB outside ckpts/emoji. Usage: check_files.sh FILE...
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
    # grep -I takes files with a NUL byte for binary; those end as they like.
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
