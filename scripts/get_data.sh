#!/usr/bin/env bash
# Downloads prompt sets into data/prompts. A second call resumes an interrupted download and verifies the files that exist.
# Usage: bash scripts/get_data.sh [NAME...]   NAME: PartiPrompts SJDPrompts MSCOCO2017 MSCOCO2014 (default: the first three)
#        FOLDER=... names another folder; MIRROR=URL downloads files of the same names from that URL (also file:///...).
# Every file is verified by its SHA-256 checksum. The checksums of PartiPrompts and SJDPrompts are those at the commits below;
# that of COCO's val2017 captions was taken from a copy. Where this script has "unknown", the checksum of the first download is
# recorded in FOLDER/SHA256SUMS, and later calls verify the file against it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${FOLDER:-data/prompts}
python=${PYTHON:-.venv/bin/python}
parti=https://raw.githubusercontent.com/google-research/parti/2c99f6652cbc7f0d0441aa91f4c7e7055bcb0071/PartiPrompts.tsv
sjd=https://raw.githubusercontent.com/jadohu/LANTERN/3a56e451dd5ebfa1903d044f754c68c420de27a9/data/prompts/SJDPrompts.tsv
coco=http://images.cocodataset.org/annotations

usage() { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"; }
die() { echo "get_data: $*" >&2; exit 2; }
sha256() { "$python" -c 'import hashlib, sys; print(hashlib.file_digest(open(sys.argv[1], "rb"), "sha256").hexdigest())' "$1"; }

check() { # FILE NAME CHECKSUM: verifies FILE, which will be called NAME; CHECKSUM may be "unknown"
    local sum known=$3 line=""
    sum=$(sha256 "$1")
    if [ "$known" = unknown ]; then
        line=$(grep -s "  $2\$" "$folder/SHA256SUMS" || true)
        known=${line%% *}
    fi
    if [ -z "$known" ]; then
        echo "$sum  $2" >>"$folder/SHA256SUMS"
        echo "get_data: $2: no checksum is known; recorded $sum in $folder/SHA256SUMS"
    elif [ "$sum" != "$known" ]; then
        die "$1 has SHA-256 $sum, expected $known: delete the file and try again"
    else
        echo "get_data: $2: checksum verified"
    fi
}

fetch() { # NAME CHECKSUM URL: downloads a file, or verifies it if it exists
    local url=$3
    if [ ! -f "$folder/$1" ]; then
        [ -z "${MIRROR:-}" ] || url=$MIRROR/${url##*/}
        curl --fail --location --retry 3 --continue-at - --silent --show-error --output "$folder/$1.part" "$url" ||
            die "$url could not be downloaded"
        check "$folder/$1.part" "$1" "$2"
        mv "$folder/$1.part" "$folder/$1"
    else
        check "$folder/$1" "$1" "$2"
    fi
}

unpack() { # ARCHIVE MEMBER CHECKSUM: extracts one file of a zip archive, or verifies it if it exists
    local name=${2##*/}
    if [ ! -f "$folder/$name" ]; then
        "$python" - "$folder/$1" "$2" "$folder/$name.part" <<'PY' || die "$folder/$1 could not be unpacked: delete the file and try again"
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target)
PY
        check "$folder/$name.part" "$name" "$3"
        mv "$folder/$name.part" "$folder/$name"
    else
        check "$folder/$name" "$name" "$3"
    fi
}

[ $# -gt 0 ] || set -- PartiPrompts SJDPrompts MSCOCO2017
for name in "$@"; do
    case $name in
        -h | --help) usage; exit 0 ;;
        PartiPrompts | SJDPrompts | MSCOCO2017 | MSCOCO2014) ;;
        *) die "unknown prompt set $name; choose from PartiPrompts SJDPrompts MSCOCO2017 MSCOCO2014" ;;
    esac
done
mkdir -p "$folder"
for name in "$@"; do
    case $name in
        PartiPrompts) fetch PartiPrompts.tsv fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb "$parti" ;;
        SJDPrompts) fetch SJDPrompts.tsv ae41feb48972e6d16c8f1944ec31814df40fa7de47b245a39abf32eaa7babe8e "$sjd" ;;
        MSCOCO2017)
            fetch annotations_trainval2017.zip unknown "$coco/annotations_trainval2017.zip"
            unpack annotations_trainval2017.zip annotations/captions_val2017.json \
                afe3b30e403dd7f228e2373023abbd60042a6e10ec6874d3652df034d289ebb9
            unpack annotations_trainval2017.zip annotations/captions_train2017.json unknown
            ;;
        MSCOCO2014)
            fetch annotations_trainval2014.zip unknown "$coco/annotations_trainval2014.zip"
            unpack annotations_trainval2014.zip annotations/captions_val2014.json unknown
            ;;
    esac
done
