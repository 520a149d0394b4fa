# Verifies all the time, for $seconds, what it wrote a moment ago, in blocks of all sizes, without ever flushing: what was
# answered must be there although the server that answered was killed.
echo ready
job --filename=/dev/lab/data --size=120m --bsrange=4k-32k --verify_backlog=64 --verify_dump=0 --time_based --runtime=$seconds
dd if=/dev/urandom of=/root/after bs=64k count=16 conv=fsync status=none
sha256sum /dev/lab/data | sed 's/^/data /'
