# Successors of the servers of servers.sh that die.
# Successors that die soon after the old server has left, whatever they are about: each kernel has moments of its own.
moments="000 060 300"
[ "$own_transports" != zero-copy ] || moments="020 150"
for ms in $moments; do
    old=$server
    /mnt/ringdisk --log info ublk upgrade --all >dead.out 2>dead.err & dead=$!
    wait $old && echo "left"
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ringdisk ublk list | awk '{ print $2 }' | sort | uniq -c | tr -s ' \n' ' ' | sed "s/^/after $ms /"
    echo
    add again recover --all
    served $ms $server
    loaded
done
