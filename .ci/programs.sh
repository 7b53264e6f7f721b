#!/usr/bin/env bash
# Programs that tests use and pip does not bring: installed from Debian where this user may, named on stdout if they must be there.
set -euo pipefail
declare -A package=([promtool]=prometheus [prometheus]=prometheus [chromium]=chromium)
missing=()
for program in "${!package[@]}"; do
  command -v "$program" > /dev/null || missing+=("${package[$program]}")
done
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
  if [ ${#missing[@]} -gt 0 ]; then
    # Prometheus's own service must not start: tests start one of their own.
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2
    rm -f /usr/sbin/policy-rc.d
  fi
  echo "${!package[@]}" | tr ' ' ','
fi
