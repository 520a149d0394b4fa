//! A virtqueue in memory that a hostile guest writes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::virtqueue::body(bytes);
});
