# A machine that is killed under load, and another one on the same images.
run load & machine=$!
wait_for load ready
sleep 3
for process in /proc/[0-9]*; do
    [ "$(readlink $process/exe)" != /mnt/ringdisk ] || kill -9 "${process#/proc/}"
done
wait $machine || true
./ringdisk image check data.qcow2 | sed 's/^/check /' || true
run load && echo "ended 0" || echo "ended $?"
told load
