#!/usr/bin/env bash
# Puts load on a service of the embedded model by Locust (serve/locustfile.py), and compares every image with the one made offline. Locust
# prints the milliseconds to the first picture and to the image, and writes them to runs/load. Calls 127.0.0.1 alone.
# Usage: [PORT=8765] [USERS=16] [TIME=3m] bash scripts/load_test.sh [options of serve/locustfile.py, such as --methods self-draft ar]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
host=http://127.0.0.1:${PORT:-8765}
out=runs/load
rm -rf "$out"
mkdir -p "$out"
$python main.py serve --port "${PORT:-8765}" &
service=$!
trap 'kill $service 2> /dev/null || true' EXIT
until curl --silent --fail --output /dev/null "$host/health"; do
    kill -0 $service # ends the script where the service has ended
    sleep 1
done
$python -m locust -f serve/locustfile.py --headless --only-summary --host "$host" --users "${USERS:-16}" --run-time "${TIME:-3m}" \
    --stop-timeout 60 --csv "$out/times" --save "$out/images" "$@"
kill $service
wait $service
$python main.py load_test --images "$out/images" --batch_size 4
