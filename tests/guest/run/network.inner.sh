# connected: gives the machine's network interface, in the last slot, an address beside the host's.
connected() {
    modprobe virtio_net
    soon 20 [ -e /sys/bus/pci/devices/0000:00:1f.0/virtio*/net ]
    interface=$(ls /sys/bus/pci/devices/0000:00:1f.0/virtio*/net)
    echo "address $(cat /sys/class/net/$interface/address)"
    busybox ip addr add 192.0.2.2/24 dev $interface
    busybox ip link set $interface up
}
