#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains on hosts over ssh: ssh.sh "HOST HOST ..." RANKS_PER_HOST script.py [ARGUMENTS]
#
# Ranks meet on the first host, by the name or address given here. Every host must have DLCP installed, and this folder
# at the same path. The run ends when any host fails, and on Ctrl-C. MASTER_PORT chooses another port.
set -eu

if [ $# -lt 3 ]; then
    echo 'usage: ssh.sh "HOST HOST ..." RANKS_PER_HOST script.py [ARGUMENTS]' >&2
    exit 2
fi
hosts=$1 ranks=$2
shift 2
head=${hosts%% *} count=0
for _ in $hosts; do count=$((count + 1)); done

quoted() { # the arguments as words of a remote shell
    for word in "$@"; do printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"; done
}

job=$(date +%s)-$$
secret=.dlcp-secret-$job # a file in each home, sent over standard input: unlike arguments, not visible to others

run_on() { # arguments: host, command; a failure ends the script
    # With a terminal (-tt) the remote command ends with the connection.
    ssh -tt -o BatchMode=yes "$1" "$2" < /dev/null &
    connection=$!
    trap 'kill "$connection" 2> /dev/null' TERM
    wait "$connection" || kill -TERM $$
}

end() {
    trap - EXIT
    trap '' INT TERM
    # shellcheck disable=SC2086  # split into words on purpose
    kill $running 2> /dev/null || true
    for host in $hosts; do ssh -o BatchMode=yes "$host" "rm -f $secret" < /dev/null || true; done
}
running=
trap end EXIT
trap 'exit 1' INT TERM

key=$(openssl rand -hex 32)
for host in $hosts; do
    printf '%s\n' "$key" | ssh -o BatchMode=yes "$host" "umask 077 && cat > $secret"
done

node=0
for host in $hosts; do
    train="cd $(quoted "$PWD") && DLCP_SECRET_FILE=\$HOME/$secret exec dlcp train --nnodes $count \
        --nproc-per-node $ranks --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint $head:${MASTER_PORT:-29500} \
        --rdzv-id $job --rdzv-conf is_host=$((node == 0)) -- $(quoted "$@")"
    run_on "$host" "$train" &
    running="$running $!"
    node=$((node + 1))
done
wait
