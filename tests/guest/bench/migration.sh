# What a guest does that migrates while its disk is in use: it writes at a rate, and prints a letter whenever a read has been answered.
fio --name=load --filename=/dev/lab/data --size=128m --rw=randwrite --bs=4k --ioengine=libaio --iodepth=8 --direct=1 \
    --rate_iops=200 --time_based --runtime=3600 --eta=never --output=/dev/shm/fio &
cat >/dev/shm/beat.pl <<'END'
$| = 1;
sysopen my $disk, '/dev/lab/data', 0x4000 or die "cannot open the disk past the page cache: $!";
my $buffer = "\0" x 2048;
my $at = 512 - unpack('Q', pack 'P', $buffer) % 512;
print "begun\n";
while (1) {
    sysseek $disk, 512 * int rand 65536, 0;
    sysread($disk, $buffer, 512, $at) == 512 or die "a read fails: $!";
    print '.';
    select undef, undef, undef, 0.001;
}
END
perl /dev/shm/beat.pl
