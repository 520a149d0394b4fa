//! Our reading of mutated images beside that of `qemu-img convert`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::differential::body(bytes);
});
