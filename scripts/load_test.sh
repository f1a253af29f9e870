#!/usr/bin/env bash
# Measures a service of the embedded model, and its AR baseline beside it: images per minute, and the seconds to the first partial image
# and to the image, with as many clients as slots, with four times as many, with four times as many that ask for no partial images, and
# with requests that arrive at random. Also times generate_images with as many images in flight as slots. Stores all of it in
# runs/load/load.json and prints the table. Listens on and calls 127.0.0.1 alone; takes some ten minutes on two cores.
# With MIXED=1 it only does the acceptance test: 200 requests of four methods, two temperatures, with and without guidance, a fifth of whose
# clients go away. Every image must equal that of Pipeline, and the service may not grow. Takes some eight minutes.
# Usage: [PORT=8765] [REQUESTS=64] [RATE=0.5] [MIXED=1] bash scripts/load_test.sh [options of `main.py serve`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
port=${PORT:-8765} requests=${REQUESTS:-64} rate=${RATE:-0.5}
out=runs/load
prompts=configs/emoji_contact.txt
slots=4
rm -f "$out/load.json"
$python main.py serve --host 127.0.0.1 --port "$port" --batch_size $slots "$@" &
service=$!
trap 'kill $service 2> /dev/null || true' EXIT
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 $service # ends the script where the service has ended
    sleep 1
done
load_test() {
    $python main.py load_test --output_dir "$out" "$@"
}
call() {
    load_test --url "http://127.0.0.1:$port" "$@"
}
if [ "${MIXED:-0}" = 1 ]; then
    call --pid $service --requests 200 --concurrency 16 --cancelled 0.2 --methods self-draft adt-tree eagle-2 ar --temperatures 0 1 \
        --guidances 1 3 --compare emoji
else
    usual=(--prompts "$prompts" --requests "$requests" --minutes 10)
    for method in self-draft ar; do
        call "${usual[@]}" --methods $method --concurrency $slots
        call "${usual[@]}" --methods $method --concurrency $((4 * slots))
        call "${usual[@]}" --methods $method --concurrency $((4 * slots)) --partial_images 0
        call "${usual[@]}" --methods $method --rate "$rate"
    done
fi
kill $service
wait $service
if [ "${MIXED:-0}" != 1 ]; then
    for method in self-draft ar; do load_test "${usual[@]}" --methods $method --offline $slots; done
fi
