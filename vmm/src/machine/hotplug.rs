//! Adding and removing disks while the guest runs, and the power button: the registers between the machine and the guest's ACPI code,
//! one bit per slot. The host bridge in slot 0 stays: its bit is the button's. ACPI 6.5, 5.6.9 (events), 6.3 (insertion and removal),
//! 4.8.3.1.1 (buttons).
//!
//! | offset | register | read | ones written |
//! |---|---|---|---|
//! | 0 | inserted | slots with a function that is new to the guest | the guest has seen them |
//! | 4 | asked | slots whose function the guest is asked to release; bit 0: the button was pressed | the guest has seen the request |
//! | 8 | eject | 0 | the guest has released the function, which is removed |
//!
//! The interrupt line is high while a bit of the first two is set, so that events before the guest listens stay
//! pending. Each register is read and written as a whole; anything else reads as zeros and does nothing.
//!
//! Invariants: when a write to `eject` returns, nothing of the slot's function touches guest memory; what a guest
//! writes reaches slots that hold a function and nothing else, whether it was asked to or not.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::bus::Ports;

const INSERTED: u16 = 0;
const ASKED: u16 = 4;
const EJECT: u16 = 8;
/// The power button's bit, in place of a slot.
pub(super) const BUTTON: usize = 0;
/// The size of the registers, in bytes.
pub(super) const REGISTER_BYTES: u16 = 12;

#[derive(Debug, Default)]
struct State {
    inserted: u32,
    asked: u32,
    high: bool,
}

type SetLine = Box<dyn Fn(bool) + Send + Sync>;
type Eject = Box<dyn Fn(usize) + Send + Sync>;

/// The registers.
pub(super) struct Hotplug {
    state: Mutex<State>,
    line: SetLine,
    eject: Eject,
}

impl fmt::Debug for Hotplug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hotplug")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Hotplug {
    /// Returns registers without pending events. `line` sets the interrupt's level; `eject` removes the function of a
    /// slot, if there is one, and returns when it no longer touches guest memory.
    pub(super) fn new(
        line: impl Fn(bool) + Send + Sync + 'static,
        eject: impl Fn(usize) + Send + Sync + 'static,
    ) -> Self {
        Self {
            state: Mutex::default(),
            line: Box::new(line),
            eject: Box::new(eject),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        let high = state.inserted | state.asked != 0;
        if high != state.high {
            state.high = high;
            // With the lock held, or an older level might come last.
            (self.line)(high);
        }
    }

    /// Tells the guest that there is something new in `slot`.
    pub(super) fn insert(&self, slot: usize) {
        self.change(|state| {
            state.inserted |= 1 << slot;
            state.asked &= !(1 << slot);
        });
    }

    /// Asks the guest to release the function in `slot`.
    pub(super) fn ask(&self, slot: usize) {
        self.change(|state| state.asked |= 1 << slot);
    }

    /// Presses the power button.
    pub(super) fn press_power_button(&self) {
        self.ask(BUTTON);
    }

    fn eject(&self, slots: u32) {
        for slot in (0..32).filter(|&slot| slot != BUTTON && slots & 1 << slot != 0) {
            // What was to be said of the slot was about what is there no more.
            self.change(|state| {
                state.inserted &= !(1 << slot);
                state.asked &= !(1 << slot);
            });
            (self.eject)(slot);
        }
    }
}

/// The registers at their ports.
#[derive(Debug)]
pub(super) struct HotplugPorts(pub(super) Arc<Hotplug>);

impl Ports for HotplugPorts {
    fn read(&mut self, offset: u16, data: &mut [u8]) {
        data.fill(0);
        if let Some(bytes) = data.first_chunk_mut::<4>() {
            let state = self.0.state.lock();
            let value = match offset {
                INSERTED => state.inserted,
                ASKED => state.asked,
                _ => 0,
            };
            *bytes = value.to_le_bytes();
        }
    }

    fn write(&mut self, offset: u16, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let slots = u32::from_le_bytes(bytes);
        match offset {
            INSERTED => self.0.change(|state| state.inserted &= !slots),
            ASKED => self.0.change(|state| state.asked &= !slots),
            EJECT => self.0.eject(slots),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Noted<T> = Arc<Mutex<Vec<T>>>;

    /// Registers, what their line was set to in turn, and which slots were taken out.
    fn registers() -> (HotplugPorts, Noted<bool>, Noted<usize>) {
        let (lines, ejected) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let (line, out) = (Arc::clone(&lines), Arc::clone(&ejected));
        let hotplug = Hotplug::new(
            move |high| line.lock().push(high),
            move |slot| out.lock().push(slot),
        );
        (HotplugPorts(Arc::new(hotplug)), lines, ejected)
    }

    fn read(ports: &mut HotplugPorts, offset: u16) -> u32 {
        let mut bytes = [0xFF; 4];
        ports.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn line_is_high_until_every_event_is_acknowledged() {
        let (mut ports, lines, _) = registers();
        ports.0.insert(3);
        ports.0.insert(31);
        ports.0.ask(5);
        assert_eq!(read(&mut ports, INSERTED), 1 << 3 | 1 << 31);
        assert_eq!(read(&mut ports, ASKED), 1 << 5);
        assert_eq!(read(&mut ports, EJECT), 0);
        ports.write(INSERTED, &(1u32 << 3 | 1 << 5).to_le_bytes());
        assert_eq!(read(&mut ports, INSERTED), 1 << 31);
        ports.write(INSERTED, &u32::MAX.to_le_bytes());
        assert_eq!(*lines.lock(), [true]);
        ports.write(ASKED, &(1u32 << 5).to_le_bytes());
        assert_eq!(*lines.lock(), [true, false]);
        // Asked again, the guest hears it again.
        ports.0.ask(5);
        assert_eq!(*lines.lock(), [true, false, true]);
    }

    #[test]
    fn ejected_slot_has_no_pending_events() {
        let (mut ports, lines, ejected) = registers();
        ports.0.insert(1);
        ports.0.ask(1);
        assert_eq!(read(&mut ports, ASKED), 1 << 1, "asked after it was inserted");
        ports.write(EJECT, &(1u32 << 1 | 1 << 30).to_le_bytes());
        assert_eq!(*ejected.lock(), [1, 30]);
        assert_eq!((read(&mut ports, INSERTED), read(&mut ports, ASKED)), (0, 0));
        assert_eq!(*lines.lock(), [true, false]);
        // What comes into a slot was not asked to leave it.
        ports.0.ask(2);
        ports.0.insert(2);
        assert_eq!((read(&mut ports, INSERTED), read(&mut ports, ASKED)), (1 << 2, 0));
    }

    #[test]
    fn pressed_button_is_pending_until_the_guest_has_seen_it() {
        let (mut ports, lines, ejected) = registers();
        ports.0.press_power_button();
        ports.0.ask(4);
        assert_eq!(read(&mut ports, ASKED), 1 | 1 << 4);
        // It is nothing that a guest could release.
        ports.write(EJECT, &1u32.to_le_bytes());
        assert_eq!((read(&mut ports, ASKED), ejected.lock().len()), (1 | 1 << 4, 0));
        ports.write(ASKED, &1u32.to_le_bytes());
        assert_eq!(read(&mut ports, ASKED), 1 << 4);
        assert_eq!(*lines.lock(), [true]);
    }

    #[test]
    fn partial_register_access_does_nothing() {
        let (mut ports, lines, ejected) = registers();
        ports.0.insert(0);
        ports.write(EJECT, &[1]);
        ports.write(EJECT + 1, &u32::MAX.to_le_bytes());
        ports.write(EJECT, &[0xFF; 8]);
        ports.write(INSERTED, &[1, 0]);
        ports.write(REGISTER_BYTES, &u32::MAX.to_le_bytes());
        let mut byte = [0xFF];
        ports.read(INSERTED, &mut byte);
        assert_eq!((byte, read(&mut ports, INSERTED + 1)), ([0], 0));
        assert_eq!(*ejected.lock(), [0; 0]);
        assert_eq!((*lines.lock()).len(), 1);
        assert_eq!(read(&mut ports, INSERTED), 1);
    }
}
