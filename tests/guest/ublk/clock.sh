# What the scripts of many devices measure with.
now() { echo $(($(date +%s%N) / 1000000)); }
# served LOG COUNT: waits for so many devices.
served() {
    soon 60 told "$1" $2 || true
    [ "$(wc -l <"$1.out")" = $2 ] || { echo "no devices:"; cat "$1.err"; exit 1; }
}
told() { [ "$(wc -l <"$1.out")" = $2 ] || ! alive $server; }
are() { [ "$(ringdisk ublk list --json | tr '{' '\n' | grep -c "\"state\":\"$1\"")" = $2 ]; }
# state NAME: waits until so many devices are so.
state() {
    soon 60 are "$1" $2 || { ringdisk ublk list; exit 1; }
}
