#!/usr/bin/env bash
# Measures a service of the embedded model, and its AR baseline beside it: images per minute, and the seconds to the first partial image
# and to the image, with as many clients as slots, with four times as many, with four times as many that ask for no partial images, and
# with requests that arrive at random. Also times generate_images with as many images in flight as slots. Stores all of it in
# runs/load/load.json and prints the table. Listens on and calls 127.0.0.1 alone; takes some ten minutes on two cores.
# Usage: [PORT=8765] [REQUESTS=64] [RATE=0.5] bash scripts/load_test.sh [options of `main.py serve`]
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
measure() {
    $python main.py load_test --url "http://127.0.0.1:$port" --prompts $prompts --requests "$requests" --minutes 10 --output_dir "$out" "$@"
}
for method in self-draft ar; do
    measure --methods $method --concurrency $slots
    measure --methods $method --concurrency $((4 * slots))
    measure --methods $method --concurrency $((4 * slots)) --partial_images 0
    measure --methods $method --rate "$rate"
done
kill $service
wait $service
for method in self-draft ar; do measure --methods $method --offline $slots; done
$python main.py report "$out/load.json"
