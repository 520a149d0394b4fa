//! The split virtqueue and the crate `virtio-queue` on the same guest memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::rings::body(bytes);
});
