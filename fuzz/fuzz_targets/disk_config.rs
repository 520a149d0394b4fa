//! The text of a `--disk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::disk_config::body(bytes);
});
