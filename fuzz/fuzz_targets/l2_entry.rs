//! Table entries of every kind, from arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::entries::body(bytes);
});
