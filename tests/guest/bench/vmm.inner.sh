# What a machine does for the figures of I/O: each of $workloads (NAME PATTERN BLOCK DEPTH) for $seconds.
echo begun
echo "$workloads" | while read -r name pattern block depth; do
    [ -n "$name" ] || continue
    fio --name=job --filename=/dev/lab/data --size=256m --rw=$pattern --bs=$block --iodepth=$depth --direct=1 --ioengine=libaio \
        --norandommap --randrepeat=0 --time_based --runtime=$seconds --minimal >/tmp/out </dev/null
    # Terse output: field 8 is what was read, 49 what was written, in requests a second.
    awk -F';' -v name="$name" '{ print "figure " name, $8 + $49 }' /tmp/out
done
echo ended
