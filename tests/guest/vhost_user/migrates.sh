# What a guest does while it migrates: each round writes a disk and a file, and reads both back. ROUNDS says how many.
round=0
while [ "$round" -lt "$ROUNDS" ]; do
    round=$((round + 1))
    echo "round $round"
    seq "$round" "$((round + 60000))" >/srv/file
    sync
    sum=$(sha256sum </srv/file)
    fio --name=round --filename=/dev/lab/data --size=64m --offset="$((round % 3 * 64))m" --rw=randwrite --bs=4k,4k,4k --bssplit=4k/60:16k/20:64k/20 \
        --numjobs=1 --ioengine=libaio --iodepth=16 --direct=1 --fsync=64 --randseed="$round" \
        --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_backlog=128 --eta=never --output=/dev/shm/fio ||
        { cat /dev/shm/fio; exit 1; }
    echo 3 >/proc/sys/vm/drop_caches
    [ "$sum" = "$(sha256sum </srv/file)" ] || { echo "the file of round $round has changed"; exit 1; }
done
echo "rounds $round"
