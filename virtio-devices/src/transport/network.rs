//! A network interface of a guest, as it is asked for.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::tap::Tap;

/// The address of an Ethernet interface.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MacAddress(pub(super) [u8; Self::BYTES]);

/// A text that is no address of one interface.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "`{0}` is no MAC address of one interface; expected six bytes such as 52:54:00:12:34:56, the first one even"
)]
pub struct MacAddressError(pub String);

impl MacAddress {
    pub(super) const BYTES: usize = 6;

    /// An address of nobody's, made of `random`: administered locally, of one interface.
    #[must_use]
    pub fn local(random: [u8; 6]) -> Self {
        let mut bytes = random;
        bytes[0] = bytes[0] & !1 | 2;
        Self(bytes)
    }
}

impl FromStr for MacAddress {
    type Err = MacAddressError;

    fn from_str(text: &str) -> Result<Self, MacAddressError> {
        let byte = |text: &str| {
            let is_hex = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_hex.then(|| u8::from_str_radix(text, 16).ok()).flatten()
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let bytes = bytes.and_then(|bytes| <[u8; Self::BYTES]>::try_from(bytes).ok());
        bytes
            .filter(|bytes| bytes[0] & 1 == 0 && *bytes != [0; Self::BYTES])
            .map(Self)
            .ok_or_else(|| MacAddressError(text.to_owned()))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A network interface.
#[derive(Clone, Debug)]
pub struct PciNetworkConfig {
    /// The interface of the host.
    pub tap: Arc<Tap>,
    /// The address of the guest's interface.
    pub mac: MacAddress,
    /// The most entries of a queue: a power of two.
    pub queue_size: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_address_is_six_bytes_of_one_interface() {
        let address: MacAddress = "52:54:00:ab:CD:ef".parse().expect("an address");
        assert_eq!(address.to_string(), "52:54:00:ab:cd:ef");
        for wrong in [
            "",
            "52:54:00:ab:cd",
            "52:54:00:ab:cd:ef:01",
            "52-54-00-ab-cd-ef",
            "52:54:00:ab:cd:+f",
            "53:54:00:ab:cd:ef",
            "00:00:00:00:00:00",
        ] {
            assert_eq!(
                wrong.parse::<MacAddress>(),
                Err(MacAddressError(wrong.to_owned()))
            );
        }
        assert_eq!(MacAddress::local([0xFF; 6]).to_string(), "fe:ff:ff:ff:ff:ff");
    }
}
