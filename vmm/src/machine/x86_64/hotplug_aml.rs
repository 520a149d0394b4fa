//! The AML code that the guest executes when disks are added and removed, and when the power button is pressed: the counterpart of
//! [`crate::machine::hotplug`].
//!
//! An interrupt makes the generic event device call `SCAN`, which notifies the slots by the registers: a device check
//! (1), or an eject request (3); and the button (0x80). A slot that the guest has released is written to `EJCT`. ACPI 6.5, 5.6.9, 6.3.3
//! and 4.8.3.1.1.

use acpi_tables::aml::{self, Path};
use acpi_tables::{Aml, AmlSink};

use super::{HOTPLUG_PIN, HOTPLUG_PORT};
use crate::machine::bus::SLOTS;
use crate::machine::hotplug::{BUTTON, REGISTER_BYTES};

/// Notification codes: ACPI 6.5, 5.6.6.
const DEVICE_CHECK: u8 = 1;
const EJECT_REQUEST: u8 = 3;
const BUTTON_PRESSED: u8 = 0x80;

fn name(slot: usize) -> Path {
    Path::new(&format!("S{slot:02}_"))
}

/// Appends the registers, the slots and `SCAN`, all below the PCI bus.
pub(super) fn slots(body: &mut Vec<u8>) {
    let path = |name: &str| Path::new(name);
    let mut children = Vec::new();
    aml::OpRegion::new(
        path("PLUG"),
        aml::OpRegionSpace::SystemIO,
        &HOTPLUG_PORT,
        &REGISTER_BYTES,
    )
    .to_aml_bytes(&mut children);
    let register = |name: &[u8; 4]| aml::FieldEntry::Named(*name, 32);
    aml::Field::new(
        path("PLUG"),
        aml::FieldAccessType::DWord,
        aml::FieldLockRule::NoLock,
        aml::FieldUpdateRule::WriteAsZeroes,
        vec![register(b"INSD"), register(b"ASKD"), register(b"EJCT")],
    )
    .to_aml_bytes(&mut children);
    for slot in 1..SLOTS {
        let bit = 1u32 << slot;
        aml::Device::new(
            name(slot),
            vec![
                &aml::Name::new(path("_ADR"), &((slot as u32) << 16)),
                &aml::Name::new(path("_SUN"), &(slot as u8)),
                &aml::Method::new(
                    path("_EJ0"),
                    1,
                    false,
                    vec![&aml::Store::new(&path("EJCT"), &bit)],
                ),
            ],
        )
        .to_aml_bytes(&mut children);
    }
    let mut steps = Vec::new();
    for (register, heard) in [("INSD", aml::Local(0)), ("ASKD", aml::Local(1))] {
        // What is heard is said to be heard before it is acted on: what comes meanwhile interrupts again.
        aml::Store::new(&heard, &path(register)).to_aml_bytes(&mut steps);
        aml::Store::new(&path(register), &heard).to_aml_bytes(&mut steps);
    }
    for slot in 1..SLOTS {
        for (heard, said) in [(aml::Local(0), DEVICE_CHECK), (aml::Local(1), EJECT_REQUEST)] {
            aml::If::new(
                &aml::And::new(&aml::ZERO, &heard, &(1u32 << slot)),
                vec![&aml::Notify::new(&name(slot), &said)],
            )
            .to_aml_bytes(&mut steps);
        }
    }
    aml::If::new(
        &aml::And::new(&aml::ZERO, &aml::Local(1), &(1u32 << BUTTON)),
        vec![&aml::Notify::new(&path("\\_SB_.PWRB"), &BUTTON_PRESSED)],
    )
    .to_aml_bytes(&mut steps);
    aml::Method::new(path("SCAN"), 0, true, vec![&Terms(steps)]).to_aml_bytes(&mut children);
    body.extend(aml::Scope::raw(path("_SB_.PCI0"), children));
}

/// Terms that are bytes already: the crate's own ones only borrow what they are made of.
struct Terms(Vec<u8>);

impl Aml for Terms {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

/// Appends the device whose interrupt signals pending events, and the power button.
pub(super) fn event_device(body: &mut Vec<u8>) {
    let path = |name: &str| Path::new(name);
    aml::Device::new(
        path("_SB_.PWRB"),
        vec![
            &aml::Name::new(path("_HID"), &aml::EISAName::new("PNP0C0C")),
            &aml::Name::new(path("_UID"), &aml::ZERO),
        ],
    )
    .to_aml_bytes(body);
    aml::Device::new(
        path("_SB_.GED_"),
        vec![
            &aml::Name::new(path("_HID"), &"ACPI0013"),
            &aml::Name::new(path("_UID"), &aml::ZERO),
            &aml::Name::new(
                path("_CRS"),
                &aml::ResourceTemplate::new(vec![&aml::Interrupt::new(
                    true,
                    false,
                    false,
                    false,
                    HOTPLUG_PIN,
                )]),
            ),
            &aml::Method::new(
                path("_EVT"),
                1,
                true,
                vec![&aml::MethodCall::new(path("\\_SB_.PCI0.SCAN"), vec![])],
            ),
        ],
    )
    .to_aml_bytes(body);
}
