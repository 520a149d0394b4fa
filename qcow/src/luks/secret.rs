//! Secrets: what a user knows, or a key, wiped from memory when dropped.

use std::fmt;

use zeroize::Zeroizing;

/// A secret that opens an image. Its bytes are wiped when it is dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes the bytes as they are: a newline at their end counts.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_of_secret_has_no_bytes() {
        let text = format!("{:?}", Secret::new(b"open sesame".to_vec()));
        assert_eq!(text, "Secret(..)");
    }
}
