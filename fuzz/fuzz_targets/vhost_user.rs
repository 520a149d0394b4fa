//! Messages of a vhost-user client that sends what it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    bodies::vhost_user::body(bytes);
});
