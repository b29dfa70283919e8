#!/usr/bin/env bash
# Puts promtool on the PATH of a Debian or Ubuntu; quiet unless it fails. Leaves the Prometheus server itself off.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
folder=$(mktemp -d)
trap 'rm -rf "$log" "$folder"' EXIT
fetch() (cd "$folder" && apt-get download prometheus)
if ! { fetch || { apt-get -q -o Acquire::Retries=2 update && fetch; }; } >"$log" 2>&1; then
    tail -n 3 "$log" >&2
    exit 1
fi
dpkg-deb -x "$folder"/prometheus_*.deb "$folder/root"
install -m 755 "$folder/root/usr/bin/promtool" /usr/local/bin/promtool
promtool --version >/dev/null 2>&1
