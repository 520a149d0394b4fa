# The beginning of a guest's script that has a heartbeat: what it runs on its third serial port is a copy in memory.
mkdir -p /run/lab/beat
cp "$(command -v busybox)" /run/lab/beat/busybox
/run/lab/beat/busybox --install -s /run/lab/beat
cat >/run/lab/beat/run <<'BEAT'
export PATH=/run/lab/beat
stty raw -echo
while sleep 1; do echo tick; done &
threads() {
    for task in $1/task/*; do
        echo "  thread ${task##*/} $(cat $task/comm): $(grep State $task/status), user and system time $(cut -d' ' -f14,15 $task/stat)"
        echo "    waits in $(cat $task/wchan), call $(cat $task/syscall)"
        sed 's/^/    /' $task/stack
    done
}
while read -r asked; do
    for again in 1 2; do
        for process in /proc/[0-9]*; do
            [ -n "$(tr -d '\0' <$process/cmdline)" ] || grep -q 'State:.*D' $process/status || continue
            case "$(cat $process/comm)" in sleep) continue ;; esac
            echo "process ${process##*/}: $(tr '\0' ' ' <$process/cmdline)"
            threads $process
        done 2>/dev/null
        sleep 2
    done
    grep virtio /proc/interrupts
    for socket in $(awk '$6 == "01" && $NF ~ /control/ { print $NF }' /proc/net/unix); do
        [ -e "$socket" ] || socket=/mnt/$socket
        echo "control socket $socket:"
        timeout 10 /mnt/ringdisk ctl --socket "$socket" info
    done 2>&1
    for log in /mnt/*.log /mnt/*.err; do
        [ ! -e "$log" ] || timeout 10 tail -n 20 "$log" | sed "s|^|$log: |"
    done 2>&1
    echo "evidence ends"
done
BEAT
/run/lab/beat/busybox sh /run/lab/beat/run <>/dev/ttyS2 >&0 2>&0 &
