# Disks that come to a running machine, go, and come again: first our own, then one that another program serves.
./ringdisk image create -o cluster_size=16k hot.qcow2 128M >/dev/null
echo 200 >/proc/sys/vm/nr_hugepages
KERNEL=vmlinux CPUS=4 MEMORY=size=512M,hugepages=on,host_numa_node=0
run few 2>&1 | sed 's/^/few /' || true
sed 's/^/few /' few.err
echo 256 >/proc/sys/vm/nr_hugepages
free() { grep HugePages_Free /proc/meminfo | tr -dc 0-9 | sed "s/.*/pages $1 &/"; echo; }
free before
run hot --control control & machine=$!
say() { sed "s/^/$1 /"; }
unlocked() { ./ringdisk io --disk path=hot.qcow2 -c "read 0 4k" >/dev/null 2>&1; }
HOT=path=hot.qcow2,id=hot,serial=HOT,num_queues=2
wait_for hot "say ready"
free while
refused missing disk-add --disk path=missing.qcow2
refused twice disk-add --disk path=data.qcow2,id=other
refused id disk-add --disk path=hot.qcow2,id=data.qcow2
refused queues disk-add --disk path=hot.qcow2,num_queues=5
head -c 1M /dev/zero >zeros
refused corrupt disk-add --disk path=zeros
refused nodisk disk-remove hot
ctl info | say untouched
ctl disk-add --disk "$HOT" | say added
refused again disk-add --disk "$HOT"
wait_for hot "say unmounted"
ctl pause >/dev/null
refused paused disk-remove hot
ctl info | say asked
ctl resume >/dev/null
wait_for hot "say gone"
./ringdisk image check hot.qcow2 | say check
unlocked && echo "unlocked yes"
ctl disk-add --disk "$HOT" | say added
wait_for hot "say again"
ctl disk-resize hot 192M | say resized
wait_for hot "say let go"
soon 15 unlocked || true
./ringdisk image check hot.qcow2 | say check
ctl info | say without
ctl disk-add --disk "$HOT" | say added

./ringdisk image create -o cluster_size=16k far.qcow2 64M >/dev/null
FAR=vhost_user=on,socket=far.sock,id=far,num_queues=2
wait_for hot "say far"
# Nobody is there yet: it is refused, and nothing is left behind.
refused nobody disk-add --disk "$FAR"
serve far.sock --disk path=far.qcow2,num_queues=2,serial=FAR
ctl disk-add --disk "$FAR" | say far-added
refused far-twice disk-add --disk "$FAR"
ctl info | say far-with
wait_for hot "say far unmounted"
ctl disk-remove far | say far-removed
wait_for hot "say far gone"
ctl info | say far-without
# The server was let go, and serves whoever comes next.
ctl disk-add --disk "$FAR" | say far-added

wait_for hot "say restart"
ctl disk-remove data.qcow2 | say removed
./ringdisk image check data.qcow2 | say check
wait $machine && echo "ended 0" || echo "ended $?"
stopped
free after
told hot
